"""Copies between the device and page-locked memory of the host, while the device computes."""

import torch


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
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        except RuntimeError as error:  # of CUDA, in the words that it has for the device's memory
            raise MemoryError(
                f"the host has no room for {size} bytes of page-locked memory, which layers that offload need; end "
                "other programs that use its memory"
            ) from error

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
