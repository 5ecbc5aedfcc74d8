"""Analytic layer costs from a model's shape and a device's data sheet, for devices that are not here to be measured.

They assume efficiencies instead of measuring them: plans of one model can be compared, but the seconds are rough.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trials.costs.coefficients import KINDS, NOTHING, Coefficients, LayerKind
from trials.costs.exchange import Exchange
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts, LinkCost, LoadCost, UpdateCost

LABEL = "analytic device profile: computed from shapes and data sheets, nothing measured"
"""Label for all results of these costs."""

_ELEMENT_BYTES = 2
_OPTIMIZER_BYTES = 30
"""Bytes that Adam moves per parameter: float32 weight and two moments both ways, gradient in, 16-bit weight out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Shape of a vision transformer whose states are merged and projected into the language model."""

    layers: int
    hidden: int
    mlp: int
    tokens: int
    """Tokens of a tile inside the transformer, class token included."""
    image_tokens: int
    """Tokens of a tile inside the language model."""
    patch_values: int = 3 * 14**2
    """Numbers in a patch of pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageShape:
    """Shape of a decoder with gated feed-forward layers and grouped keys."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool = False
    """Whether the output projection is the word embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Data sheet of one device, with the shares of it that layers are assumed to reach."""

    name: str
    peak_flops: float
    """Per second, in 16-bit matrix products."""
    efficiency: float
    """Share of the peak that matrix products reach."""
    memory_bytes_per_second: float
    tensor_bytes_per_second: float
    """Inside a tensor-parallel group, for each device."""
    link_bytes_per_second: float
    """Between stages and between data-parallel ranks."""
    link_latency_seconds: float = 2e-5


A100 = Device(
    name="A100 80 GB SXM",
    peak_flops=312e12,
    efficiency=0.5,
    memory_bytes_per_second=2.0e12,
    tensor_bytes_per_second=240e9,
    link_bytes_per_second=20e9,
)
"""NVLink inside a node at 80 % of 300 GB/s; a 200 Gbit/s network at 80 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Work of one layer in a forward pass for one unit, token or squared length."""

    flops: float = 0.0
    moved_values: float = 0.0
    """Values read and written outside matrix products."""
    gathered_values: float = 0.0
    """Values exchanged in the tensor-parallel group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selective:
    """Values of one layer that is recomputed selectively, per unit and per token."""

    kept: tuple[float, float] = (0, 0)
    most: tuple[float, float] = (0, 0)
    """Kept, or computed again and needed, at once."""
    moved: tuple[float, float] = (0, 0)
    """Read and written by norms, activation functions and gates, which alone run again."""


def analytic_costs(
    vision: VisionShape,
    language: LanguageShape,
    device: Device,
    tensor_degree: int = 1,
    sequence_degrees: Sequence[int] = (),
    *,
    tensor_degrees: Sequence[int] = (),
    shares: int = 1,
    fused: bool = True,
) -> LayerCosts:
    """Return the costs of one rank, which holds 1 / `tensor_degree` of each layer and its states.

    With `tensor_degree` 1, `sequence_degrees` are numbers of ranks of one node that may share packs, `tensor_degrees`
    numbers of ranks that may hold the language layers together as the engine does, and with `shares` above 1 that
    number of data ranks may hold the weights in shards (ZeRO 3).

    Of n parameters a matrix takes 2 n operations per token, attention 4 n^2 h on n tokens, half where it is causal
    (Megatron-LM, appendix). Kept is the input of every operation, with attention that keeps no scores (Korthikanti et
    al. 2022, section 4, less what flash attention saves). Times of operations, memory and exchange add up. Layers that
    are recomputed selectively keep the inputs of norms, queries, keys, values, the outputs of attention, and those of
    the first products of the feed-forward part. Unless language layers are `fused`, their norms keep float32 states and
    normed ones too, and their gates the activation, as modules of transformers do.
    """
    share, ranks = _Share(device, tensor_degree), max(2, shares)
    layer, head = _language_layer(language, share, fused=fused), _head(language, share)
    layers: list[tuple[LayerKind, LayerCost]] = [
        ("vision_embedding", _vision_embedding(vision, share)),
        ("vision", _vision_layer(vision, share)),
        ("projector", _projector(vision, language, share)),
        ("language", replace(layer, tensor_parallel_parameters=layer.parameters if tensor_degrees else 0)),
        ("head", replace(head, tied_parameters=head.parameters if language.tied else 0)),
    ]
    return LayerCosts(
        layers=tuple(layers),
        loading=LoadCost(),
        link=LinkCost(latency_seconds=device.link_latency_seconds, seconds_per_byte=1 / device.link_bytes_per_second),
        updates=(
            UpdateCost(
                zero=0,
                data_parallel=1,
                seconds_per_parameter=_OPTIMIZER_BYTES / device.memory_bytes_per_second,
            ),
        ),
        residual=0.0,
        exchanges=(
            # Each rank of a ring sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009).
            Exchange.of_bytes("average", ranks, 0.0, 2 * (1 - 1 / ranks) / device.link_bytes_per_second),
            *(each for degree in sequence_degrees for each in _shared(vision, language, device, degree, layer)),
            *(_cut(language, device, degree) for degree in tensor_degrees),
            *(_gathered([cost for _, cost in layers], device, shares) if shares > 1 else ()),
        ),
    )


def without_selective(costs: LayerCosts) -> LayerCosts:
    """Return the costs for plans that recompute layers as a whole alone."""
    return _without(costs, "selective_seconds", "selective_bytes", "selective_peak_bytes")


def without_deferral(costs: LayerCosts) -> LayerCosts:
    """Return the costs for plans whose stages defer no weight gradients."""
    return _without(costs, "weight_seconds", "deferral_seconds", "weight_bytes")


def _without(costs: LayerCosts, *names: str) -> LayerCosts:
    nothing: dict[str, Any] = dict.fromkeys(names, NOTHING)
    return replace(costs, layers=tuple((kind, replace(cost, **nothing)) for kind, cost in costs.layers))


def _gathered(layers: Sequence[LayerCost], device: Device, shares: int) -> Iterator[Exchange]:
    """Yield what data ranks exchange that hold weights in shards: each receives all but its own, as in a ring."""
    rate = (shares - 1) / shares / device.link_bytes_per_second
    for kind, layer in zip(KINDS, layers, strict=True):
        seconds = device.link_latency_seconds + rate * _ELEMENT_BYTES * layer.parameters
        gather: Coefficients = 0.0, 0.0, 0.0, seconds
        backward = NOTHING if kind == "head" else gather
        yield Exchange(name="gather", ranks=shares, layer=kind, forward_seconds=gather, backward_seconds=backward)
    yield Exchange.of_bytes("scatter", shares, 0.0, rate)


def _shared(
    vision: VisionShape, language: LanguageShape, device: Device, degree: int, layer: LayerCost
) -> tuple[Exchange, Exchange]:
    """Return what ranks exchange that share a pack (DeepSpeed-Ulysses): queries, keys and values, then the outputs.

    Fewer key heads than ranks are repeated. Behind the projector go the features of the images.
    """
    rate = _ELEMENT_BYTES * (degree - 1) / degree / device.tensor_bytes_per_second
    keys = 2 * language.hidden * max(language.key_heads, degree) // language.heads
    attention: Coefficients = 0.0, rate * (2 * language.hidden + keys), 0.0, 2 * device.link_latency_seconds
    features: Coefficients = rate * vision.image_tokens * language.hidden, 0.0, 0.0, device.link_latency_seconds
    in_attention = Exchange(
        name="sequence",
        ranks=degree,
        layer="language",
        forward_seconds=attention,
        backward_seconds=attention,
        recompute_seconds=attention,
        kept_bytes=layer.kept_bytes,
        shared_bytes=layer.shared_bytes,
        transient_bytes=layer.transient_bytes,
    )
    behind_projector = Exchange(
        name="sequence", ranks=degree, layer="projector", forward_seconds=features, backward_seconds=features
    )
    return in_attention, behind_projector


def _cut(language: LanguageShape, device: Device, degree: int) -> Exchange:
    """Return what ranks exchange that hold a language layer: a gather and a reduce-scatter around both blocks.

    The backward pass has as many, and gathers the states again. Each rank receives all parts but its own.
    """
    rate = _ELEMENT_BYTES * (degree - 1) * language.hidden / device.tensor_bytes_per_second
    passes = 4, 6
    forward, backward = ((0.0, count * rate, 0.0, count * device.link_latency_seconds) for count in passes)
    return Exchange(
        name="tensor",
        ranks=degree,
        layer="language",
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=forward,
    )


class _Share:
    """One device's share of the layers."""

    def __init__(self, device: Device, degree: int) -> None:
        self._device, self._degree = device, degree

    def seconds(self, work: _Work) -> float:
        device, degree = self._device, self._degree
        gathered = work.gathered_values * (degree - 1) / degree
        return (
            work.flops / degree / (device.peak_flops * device.efficiency)
            + work.moved_values / degree * _ELEMENT_BYTES / device.memory_bytes_per_second
            + gathered * _ELEMENT_BYTES / device.tensor_bytes_per_second
        )

    def layer(
        self,
        parameters: float,
        *,
        unit: _Work = _Work(),
        token: _Work = _Work(),
        square: _Work = _Work(),
        kept: tuple[float, float],
        output: tuple[float, float],
        selective: _Selective = _Selective(),
    ) -> LayerCost:
        """Return the costs of this share; `kept` and `output` are values of the whole layer per unit and per token."""
        read = _Work(moved_values=parameters)
        units, tokens, squares, constant = map(self.seconds, (unit, token, square, read))
        forward = units, tokens, squares, constant
        of_unit, of_token = (self.seconds(_Work(moved_values=values)) for values in selective.moved)
        return LayerCost(
            forward_seconds=forward,
            # Products for the inputs and for the weights (Megatron-LM, appendix).
            backward_seconds=(2 * units, 2 * tokens, 2 * squares, 2 * constant),
            recompute_seconds=forward,
            kept_bytes=self._bytes(kept),
            output_bytes=self._bytes(output),
            parameters=round(parameters / self._degree),
            selective_seconds=(of_unit, of_token, 0.0, 0.0),
            selective_bytes=self._bytes(selective.kept),
            selective_peak_bytes=self._bytes(selective.most),
        )

    def _bytes(self, values: tuple[float, float]) -> Coefficients:
        unit, token = (value * _ELEMENT_BYTES / self._degree for value in values)
        return unit, token, 0.0, 0.0


def _vision_embedding(vision: VisionShape, share: _Share) -> LayerCost:
    values = vision.tokens * vision.hidden
    return share.layer(
        (vision.patch_values + vision.tokens) * vision.hidden,
        unit=_Work(flops=2 * vision.patch_values * values, moved_values=3 * values),
        kept=(vision.tokens * vision.patch_values, 0),
        output=(values, 0),
    )


def _vision_layer(vision: VisionShape, share: _Share) -> LayerCost:
    hidden, tokens = vision.hidden, vision.tokens
    parameters = 4 * hidden**2 + 2 * hidden * vision.mlp
    return share.layer(
        parameters,
        unit=_Work(
            flops=2 * parameters * tokens + 4 * tokens**2 * hidden,
            # Two norms and two sums over the states, and the activation function.
            moved_values=(10 * hidden + 2 * vision.mlp) * tokens,
            gathered_values=4 * hidden * tokens,
        ),
        # Inputs of norm, attention's projection, attention, output projection, norm, and of the feed-forward part.
        kept=((8 * hidden + 2 * vision.mlp) * tokens, 0),
        output=(tokens * hidden, 0),
        # Both norms give their outputs again, and the activation function its own, which alone is needed first.
        selective=_Selective(
            kept=((6 * hidden + vision.mlp) * tokens, 0),
            most=((6 * hidden + 2 * vision.mlp) * tokens, 0),
            moved=((4 * hidden + 2 * vision.mlp) * tokens, 0),
        ),
    )


def _projector(vision: VisionShape, language: LanguageShape, share: _Share) -> LayerCost:
    """Return the costs of the projector with the text embedding."""
    # The projector joins neighbouring tokens, such as 4 in InternVL; the division drops the class token.
    joined = vision.tokens // vision.image_tokens * vision.hidden
    matrices = (joined + language.hidden) * language.hidden
    return share.layer(
        matrices + language.vocabulary * language.hidden,
        unit=_Work(flops=2 * matrices * vision.image_tokens, moved_values=4 * joined * vision.image_tokens),
        token=_Work(moved_values=2 * language.hidden),
        kept=((2 * joined + 2 * language.hidden) * vision.image_tokens, 0),
        output=(0, language.hidden),
    )


def _language_layer(language: LanguageShape, share: _Share, *, fused: bool) -> LayerCost:
    hidden, mlp = language.hidden, language.mlp
    keys = 2 * hidden * language.key_heads // language.heads
    parameters = 2 * hidden**2 + hidden * keys + 3 * hidden * mlp
    # Inputs of both norms, queries, keys, values, the output of attention, and both outputs of the gated part.
    expensive = 4 * hidden + keys + 2 * mlp
    if fused:
        of_norms, of_norm, of_gate, again = 2 * hidden, hidden, mlp, 4 * hidden + 3 * mlp
    else:
        # A float32 value counts as two. A norm keeps its input in float32 in place of that in 16 bits, the normed
        # states, and the output; it has six operations that read and write states, and a gate two.
        of_norms, of_norm, of_gate, again = 6 * hidden, 4 * hidden, 2 * mlp, 36 * hidden + 5 * mlp
    return share.layer(
        parameters,
        token=_Work(flops=2 * parameters, moved_values=6 * hidden + again, gathered_values=4 * hidden),
        square=_Work(flops=2 * hidden),
        kept=(0, expensive + of_norms + of_gate),
        output=(0, hidden),
        # The gate's part is needed first, and is free when that of a norm is.
        selective=_Selective(kept=(0, expensive), most=(0, expensive + max(of_norm, of_gate)), moved=(0, again)),
    )


def _head(language: LanguageShape, share: _Share) -> LayerCost:
    """Return the costs of the head with the loss, which keeps float32 logits in addition to the 16-bit ones.

    Its tokens are targets.
    """
    parameters = language.hidden * language.vocabulary
    return share.layer(
        parameters,
        token=_Work(flops=2 * parameters, moved_values=6 * language.vocabulary),
        kept=(0, 2 * language.hidden + 3 * language.vocabulary),
        output=(0, 0),
    )
