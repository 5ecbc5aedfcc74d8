"""Page-locked memory of the host, from and to which a GPU copies while its host continues."""

from collections.abc import Iterator
from contextlib import contextmanager

# CUDA has the same words for memory of the device.
_NO_ROOM = "CUDA error: out of memory"


@contextmanager
def page_locking(size: int, purpose: str) -> Iterator[None]:
    """Raise MemoryError where the host has no room for `size` bytes of page-locked memory, asked for in this context.

    Other errors pass: that of an earlier kernel may show here.
    """
    try:
        yield
    except RuntimeError as error:
        if _NO_ROOM not in str(error):
            raise
        raise MemoryError(
            f"the host has no room for {size} bytes of page-locked memory, which {purpose}; end other programs that "
            "use its memory"
        ) from error
