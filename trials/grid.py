"""The grid of ranks: the stage and data rank of each rank, and the groups of ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """The coordinates of a rank in its grid."""

    rank: int
    stage: int
    """Pipeline stage, from 0."""
    data_rank: int
    """Number among the ranks of the stage, from 0; each gets other data, or another part of a pack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks in pipeline x data order, as in DeepSpeed's `PipeDataParallelTopology`: ranks of one stage are neighbors.

    Nothing else computes a rank from its coordinates, or the reverse.
    """

    pipeline: int
    data: int

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of `rank`, which is at least 0 and below `world_size`."""
        stage, data_rank = divmod(rank, self.data)
        return RankCoordinates(rank=rank, stage=stage, data_rank=data_rank)

    def stage_ranks(self, stage: int) -> range:
        """Return the ranks that hold `stage` (a data-parallel group), in order of `data_rank`."""
        return range(stage * self.data, (stage + 1) * self.data)

    def sharing_ranks(self, degree: int) -> tuple[range, ...]:
        """Return the groups of ranks that compute a pack together: `degree` neighbouring data ranks of each stage.

        `degree` divides the data ranks.
        """
        return tuple(range(first, first + degree) for first in range(0, self.world_size, degree))

    def pipeline_ranks(self, data_rank: int) -> range:
        """Return the ranks through which the packs of `data_rank` pass, in order of their stages."""
        return range(data_rank, self.world_size, self.data)
