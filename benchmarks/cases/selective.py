"""One layer of each kind kept, recomputed selectively and as a whole, in three families. Prints one JSON object.

    python -m benchmarks.cases.selective [--repeats 9]

The four ways of a layer take turns on one core, forward and backward; `torch` is torch's own selective checkpoint that
keeps the outputs of products and of attention. Seconds are those of the processor, which other programs do not use, in
float32 alone: many CPUs are slow in bfloat16, so that fewer tokens give its bytes. These are what torch's profiler saw
allocated: kept is what is left after the forward pass, with the input and without the output, and the peak is the most
at once in both passes, with gradients of states and weights. `formula` is what a backward pass
needs that starts from products and attention, written from the architecture. Gradients are compared bit by bit.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import InternVLConfig, LlavaConfig, PretrainedConfig
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

from benchmarks.cases.head import allocations
from benchmarks.output.result import Check, at_least, at_most, finish, show
from trials.job import ModelSection, TrainingSection
from trials.tasks.profiling.one_of_each import one_of_each
from trials.tasks.profiling.probes import Probe, Run, probes
from trials.tasks.profiling.quiet import interquartile_range
from trials.tasks.request import ProbeSizes

Row: TypeAlias = dict[str, Any]
TIMED = "float32"
WIDTH, INNER, HEADS, KEY_HEADS = 512, 2048, 8, 4
TOKENS = {TIMED: 512, "bfloat16": 64}
_HEAD_WIDTH = WIDTH // HEADS
_STATISTIC_BYTES = 4
"""Of the logarithm of a sum of exponentials, which attention keeps of each head and token."""
_EXPENSIVE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
)
_TEXT = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS, "vocab_size": 1000, "max_position_embeddings": 4096,
    "bos_token_id": 5, "eos_token_id": 6,
}  # fmt: skip
_VISION = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS}


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    found = []
    for row in rows(arguments.repeats):
        show(row)
        found.append(row)
    finish(found, checks_of(found))


def checks_of(found: Sequence[Row]) -> list[Check]:
    def over(way: str) -> list[float]:
        return [row["kept_bytes"]["selective"] / row["kept_bytes"][way] for row in found]

    shares = [row["kept_bytes"]["selective"] / row["formula_bytes"] for row in found]
    added = [row["added"]["selective"] / row["added"]["whole"] for row in found if "added" in row]
    equal = [float(row["equal_gradients"]) for row in found]
    return [
        at_most("kept bytes over those of the formula", shares, 1.02),
        at_least("kept bytes over those of the formula", shares, 0.99),
        at_most("kept bytes over those of a layer that keeps all", over("kept"), 0.75),
        at_most("kept bytes over those of torch's selective checkpoint", over("torch"), 1.0),
        at_most("seconds added over those of recomputation as a whole, median", [median(added)], 0.5),
        at_least("gradients are equal", equal, 1.0),
    ]


# --- layers ---


def rows(repeats: int) -> Iterator[Row]:
    """Yield the row of each layer in float32, then in bfloat16 without its seconds."""
    for dtype, tokens in TOKENS.items():
        for family, config, of_unit in _families():
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                model = ModelSection(path=folder, dtype=dtype)
                stage = one_of_each(model, TrainingSection(global_batch_samples=1), torch.device("cpu"))
            sizes = ProbeSizes(unit_counts=(tokens // of_unit,), sample_shapes=((1, tokens),))
            for probe in probes(stage, sizes, torch.device("cpu")):
                if probe.layer in ("vision", "language"):
                    layer = _Layer(probe, list(stage.parameters()))
                    yield {
                        "family": family,
                        "layer": probe.layer,
                        "dtype": dtype,
                        "formula_bytes": formula_bytes(family, probe),
                        **layer.sizes(),
                        **(layer.times(repeats) if dtype == TIMED else {}),
                    }


def _families() -> Iterator[tuple[str, PretrainedConfig, int]]:
    """Yield models of one layer in each tower, with the patches of a vision unit."""
    yield (
        "InternVL",
        InternVLConfig(
            vision_config={**_VISION, "image_size": [112, 112], "patch_size": [14, 14]},
            text_config={**_TEXT, "model_type": "qwen2"},
            image_seq_length=16,
            image_token_id=1,
        ),
        64,
    )
    yield (
        "Qwen2.5-VL",
        Qwen2_5_VLConfig(
            vision_config={
                "depth": 1, "hidden_size": WIDTH, "intermediate_size": INNER, "num_heads": HEADS,
                "out_hidden_size": WIDTH, "fullatt_block_indexes": [0],
            },
            text_config={
                **_TEXT, "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [8, 12, 12]},
            },
            image_token_id=1,
            video_token_id=2,
            vision_start_token_id=3,
            vision_end_token_id=4,
        ),
        4,
    )  # fmt: skip
    yield (
        "LLaVA",
        LlavaConfig(
            vision_config={
                **_VISION, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14,
                "projection_dim": WIDTH,
            },
            text_config={**_TEXT, "model_type": "llama"},
            image_token_index=1,
            vision_feature_layer=-1,
        ),
        64,
    )  # fmt: skip


def formula_bytes(family: str, probe: Probe) -> int:
    """Return the bytes of one layer from which its backward pass follows without a product and without attention.

    That is the input of the layer and the states between attention and feed-forward part (or what was added to them,
    where a scale learns from it), queries, keys, values, the output of attention with a statistic of each head, and the
    outputs of the first products of the feed-forward part.
    """
    rows = probe.states.numel() // probe.states.shape[-1]
    states = 4 * WIDTH  # the input, those in between, queries, and the output of attention
    if probe.layer == "language":
        values = states + 2 * KEY_HEADS * _HEAD_WIDTH + 2 * INNER
        values += 2 * _HEAD_WIDTH  # cosines and sines, once for all layers
    elif family == "InternVL":
        # A vector that learns scales the output of both parts.
        values = states + 2 * WIDTH + INNER + WIDTH
    else:
        values = states + 2 * WIDTH + (2 if family == "Qwen2.5-VL" else 1) * INNER  # gated, or not
    return rows * (values * probe.states.element_size() + HEADS * _STATISTIC_BYTES)


# --- one layer, in four ways ---


class _Layer:
    """One layer with an input, and the ways to run it."""

    def __init__(self, probe: Probe, parameters: Sequence[torch.Tensor]) -> None:
        assert probe.selective is not None
        assert probe.recomputed is not None
        self._states, self._parameters = probe.states, parameters
        self._ways: dict[str, Run] = {
            "kept": probe.run,
            "selective": probe.selective,
            "whole": probe.recomputed,
            "torch": _torch_selective(probe.run),
        }

    def sizes(self) -> Row:
        """Return the bytes of each way, and whether its gradients are those of the first."""
        kept, *others = (self._gradients(run) for run in self._ways.values())
        bytes_of = {way: self._bytes(run) for way, run in self._ways.items()}
        return {
            "equal_gradients": all(all(map(torch.equal, kept, other)) for other in others),
            "kept_bytes": {way: kept for way, (kept, _) in bytes_of.items()},
            "peak_bytes": {way: peak for way, (_, peak) in bytes_of.items()},
        }

    def times(self, repeats: int) -> Row:
        """Return the median seconds of each way with their spread, and those it adds as a share of the first's."""
        turns = [[_seconds(partial(self._passes, run)) for run in self._ways.values()] for _ in range(repeats)]
        of_ways = dict(zip(self._ways, zip(*turns, strict=True), strict=True))
        added = {
            way: [one / kept - 1 for one, kept in zip(seconds, of_ways["kept"], strict=True)]
            for way, seconds in of_ways.items()
        }
        return {
            "repeats": repeats,
            "seconds": {way: median(seconds) for way, seconds in of_ways.items()},
            "spread": {way: interquartile_range(seconds) for way, seconds in of_ways.items()},
            "added": {way: median(shares) for way, shares in added.items()},
            "added_spread": {way: interquartile_range(shares) for way, shares in added.items()},
        }

    def _forward(self, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input, which counts as kept, and the output."""
        states = self._states.detach().clone().requires_grad_()
        return states, run(states)

    def _passes(self, run: Run) -> torch.Tensor:
        states, output = self._forward(run)
        output.backward(torch.ones_like(output))
        return states

    def _gradients(self, run: Run) -> list[torch.Tensor]:
        for each in self._parameters:
            each.grad = None
        states = self._passes(run)
        # Later passes add to these gradients, as those of a step's packs do.
        found = [each.grad for each in (states, *self._parameters) if each.grad is not None]
        assert len(found) > 1
        return [each.clone() for each in found]

    def _bytes(self, run: Run) -> tuple[int, int]:
        """Return the bytes (kept, at most)."""
        held = list[torch.Tensor]()
        allocated = allocations(lambda: held.extend(self._forward(run)))
        _, output = held
        kept = sum(allocated) - output.untyped_storage().nbytes()
        held.clear()
        del output
        return kept, max(accumulate(allocations(lambda: self._passes(run))))


def _torch_selective(run: Run) -> Run:
    def policy(_: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        saves = getattr(operation, "overloadpacket", None) in _EXPENSIVE
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def selective(states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(run, states, use_reentrant=False, context_fn=contexts)
        return output

    return selective


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="of all ways, in turns (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
