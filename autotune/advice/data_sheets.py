"""Data sheets of common devices, with the shares of them that trainings reach."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autotune.errors import RecommendError

_GIBI = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """What a device can do at most, as its maker publishes it, without sparsity; and the memory that is left to use."""

    name: str
    memory_bytes: int
    """Those that torch sees: its maker's, less what the driver keeps, and error correction where memory is GDDR6.

    The figures are the "total capacity" in out-of-memory messages of torch that were published. Drivers differ by 1 %.
    """
    flops: float
    """Operations per second of matrix products in bfloat16, added up in float32."""
    float32_flops: float
    """Operations per second in float32, without TF32."""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """To another device of the node, in one direction."""
    network_bytes_per_second: float
    """To a device of another node, in one direction: the part of one device in what its node usually has."""
    source: str

    def rate(self, element_bytes: int) -> float:
        """Return the operations per second of matrix products, by the bytes of an element."""
        return self.flops if element_bytes < 4 else self.float32_flops


_A100 = DataSheet(
    name="NVIDIA A100-SXM4-80GB",
    memory_bytes=int(79.14 * _GIBI),  # github.com/lianqi1008/Control-GIC/issues/6
    flops=312e12,
    float32_flops=19.5e12,
    memory_bytes_per_second=2039e9,
    link_bytes_per_second=300e9,
    network_bytes_per_second=25e9,
    source="NVIDIA A100 Tensor Core GPU data sheet, SXM (nvidia.com/en-us/data-center/a100); DGX A100",
)
_H100 = DataSheet(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=int(79.11 * _GIBI),  # github.com/vllm-project/vllm/issues/27508
    flops=989e12,
    float32_flops=67e12,
    memory_bytes_per_second=3350e9,
    link_bytes_per_second=450e9,
    network_bytes_per_second=50e9,
    source="NVIDIA H100 Tensor Core GPU data sheet, SXM (nvidia.com/en-us/data-center/h100); DGX H100",
)
_L40S = DataSheet(
    name="NVIDIA L40S",
    memory_bytes=int(44.42 * _GIBI),  # github.com/stepfun-ai/Step-Video-T2V/issues/8
    flops=362e12,
    float32_flops=91.6e12,
    memory_bytes_per_second=864e9,
    link_bytes_per_second=32e9,
    # Servers with cards on PCIe often have one network card of 100 Gbit/s for eight of them.
    network_bytes_per_second=1.6e9,
    source="NVIDIA L40S data sheet (nvidia.com/en-us/data-center/l40s)",
)
DATA_SHEETS: dict[str, DataSheet] = {
    "a10": replace(
        _L40S,
        name="NVIDIA A10",
        memory_bytes=int(22.18 * _GIBI),  # github.com/OpenBMB/MiniCPM-V/issues/640
        flops=125e12,
        float32_flops=31.2e12,
        memory_bytes_per_second=600e9,
        source="NVIDIA A10 data sheet (nvidia.com/en-us/data-center/products/a10-gpu)",
    ),
    "a100-40gb": replace(
        _A100,
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=int(39.5 * _GIBI),  # github.com/TianheWu/CoSeR/issues/10
        memory_bytes_per_second=1555e9,
    ),
    "a100-80gb": _A100,
    "b200": replace(
        _H100,
        name="NVIDIA B200",
        memory_bytes=int(178.35 * _GIBI),  # github.com/unslothai/unsloth/issues/3411
        flops=2250e12,
        float32_flops=75e12,
        memory_bytes_per_second=8000e9,
        link_bytes_per_second=900e9,
        source="NVIDIA DGX B200 data sheet, a part in eight (nvidia.com/en-us/data-center/dgx-b200)",
    ),
    "h100": _H100,
    "h200": replace(
        _H100,
        name="NVIDIA H200",
        memory_bytes=int(139.81 * _GIBI),  # github.com/sungwon-chae/arxiv_confi, etu_logging.md
        memory_bytes_per_second=4800e9,
        source="NVIDIA H200 Tensor Core GPU data sheet, SXM (nvidia.com/en-us/data-center/h200); DGX H200",
    ),
    "l40s": _L40S,
    "rtx-4090": replace(
        _L40S,
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=int(23.52 * _GIBI),  # github.com/Soul-AILab/SoulX-FlashTalk/issues/5
        flops=165.2e12,
        float32_flops=82.6e12,
        memory_bytes_per_second=1008e9,
        source="NVIDIA Ada GPU architecture white paper, appendix A",
    ),
}


def unknown_device(name: str, profiled: Iterable[str]) -> RecommendError:
    """Return the error for a device that has no data sheet, and is none of the `profiled` ones."""
    others = ", ".join(dict.fromkeys(profiled))
    only = f"; profiles are of {others}" if others else ""
    return RecommendError(
        f"there is no data sheet of a device {name!r}, only of {', '.join(DATA_SHEETS)}, and no profile of one"
        f"{only}; choose the most similar one, or measure a device with `autotune profile JOB`"
    )
