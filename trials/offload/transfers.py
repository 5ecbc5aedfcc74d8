"""Copies between the device and page-locked memory of the host, while the device computes."""

import torch

from trials.machine.page_locking import page_locking


class Transfers:
    """Copies in both directions on a CUDA stream of their own, in the order in which they are asked for.

    A copy begins when the device has done what was launched before it; the host waits for nothing. On a CPU, which has
    no memory of its own and stands in for a device in tests, copies are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_bytes(self, size: int) -> torch.Tensor:
        """Return room for this many bytes; torch's allocator takes it from what earlier copies have left.

        Raise MemoryError where the host has none.
        """
        with page_locking(size, "layers that offload need"):
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Copy without waiting, and return the event of its end; None where it has been made."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return done

    def await_end(self, done: torch.cuda.Event | None) -> None:
        """Let the device compute what is launched from now on only after a copy."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
