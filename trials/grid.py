"""The grid of ranks: the stage, data rank and tensor rank of each rank, and the groups of ranks."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """The coordinates of a rank in its grid."""

    rank: int
    stage: int
    """Pipeline stage, from 0."""
    data_rank: int
    """Number among the copies of the stage, from 0; each gets other data, or another part of a pack."""
    tensor_rank: int = 0
    """Number among the ranks that hold a copy of the stage together, from 0."""

    @property
    def leads_stage(self) -> bool:
        """Whether the rank is the first one that holds its stage."""
        return self.data_rank == self.tensor_rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks in pipeline x data x tensor order, as in DeepSpeed's `PipeModelDataParallelTopology`.

    So ranks that hold a copy of a stage together are neighbours, and all ranks of a stage are. Nodes have neighbouring
    ranks: the exchanges in each layer stay on one, and gradients are averaged on as few as possible; only states of
    packs, which are much smaller, pass between them. Nothing else computes a rank from its coordinates, or the reverse.
    """

    pipeline: int
    data: int
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.of_stage

    @property
    def of_stage(self) -> int:
        """Number of ranks that hold a stage."""
        return self.data * self.tensor

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of `rank`, which is at least 0 and below `world_size`."""
        stage, place = divmod(rank, self.of_stage)
        data_rank, tensor_rank = divmod(place, self.tensor)
        return RankCoordinates(rank=rank, stage=stage, data_rank=data_rank, tensor_rank=tensor_rank)

    def stage_ranks(self, stage: int) -> range:
        """Return the ranks that hold `stage`, in order of `data_rank`, then of `tensor_rank`."""
        return range(stage * self.of_stage, (stage + 1) * self.of_stage)

    def leaves_node(self, stage: int, of_node: int) -> bool:
        """Return whether messages of `stage` to the next one pass between nodes of `of_node` neighbours each."""
        if stage == self.pipeline - 1:
            return False
        return any(rank // of_node != (rank + self.of_stage) // of_node for rank in self.stage_ranks(stage))

    def sharing_ranks(self, degree: int) -> tuple[range, ...]:
        """Return the groups of ranks that compute a pack together: `degree` neighbouring data ranks of each stage.

        `degree` divides the data ranks. All tensor ranks of these data ranks belong to the group.
        """
        size = degree * self.tensor
        # `size` divides the ranks of a stage, so no group reaches into the next stage.
        return tuple(range(first, first + size) for first in range(0, self.world_size, size))

    @staticmethod
    def sharing_place(data_rank: int, degree: int) -> int:
        """Return the place of a data rank among the `degree` neighbours that share a pack, from 0 (`sharing_ranks`)."""
        return data_rank % degree

    def attending_ranks(self, degree: int) -> tuple[range, ...]:
        """Return the groups among which the heads of a pack are dealt: in `sharing_ranks`, those of one tensor rank."""
        return tuple(
            range(first, ranks.stop, self.tensor)
            for ranks in self.sharing_ranks(degree)
            for first in ranks[: self.tensor]
        )

    def data_ranks_of_node(self, of_node: int) -> int:
        """Return how many neighbouring data ranks can average gradients on their node of `of_node` ranks first.

        This is the size of the largest groups that divide the data ranks of a stage and each lie on one node; 1 where
        there are none, and where all data ranks of a stage are on one node.
        """
        on_node = of_node // self.tensor
        # Where tensor ranks cross nodes, or one node has all data ranks, a first average on each node saves nothing.
        if of_node % self.tensor or self.data <= on_node:
            return 1
        return math.gcd(self.data, on_node)

    def data_place(self, of_node: int) -> tuple[int, int]:
        """Return (nodes, most ranks on one of them) of the group of data ranks that lies on most nodes.

        Tensor ranks lie between its ranks. Nodes have `of_node` neighbours each; with 0 all ranks are on one.
        """
        return _data_place(self, of_node) if of_node else (1, self.data)

    def equal_ranks(self, degree: int) -> tuple[range, ...]:
        """Return the groups of ranks that have the same place in the `attending_ranks` of a degree, and one stage."""
        size = degree * self.tensor
        return tuple(
            range(ranks.start + place, ranks.stop, size)
            for ranks in map(self.stage_ranks, range(self.pipeline))
            for place in range(size)
        )

    def pipelines(self) -> tuple[range, ...]:
        """Return the groups of ranks through which packs pass, each in order of their stages."""
        return tuple(range(first, self.world_size, self.of_stage) for first in range(self.of_stage))


@cache
def _data_place(grid: Grid, of_node: int) -> tuple[int, int]:
    groups = (Counter(rank // of_node for rank in ranks) for ranks in grid.attending_ranks(grid.data))
    return max((len(nodes), max(nodes.values())) for nodes in groups)
