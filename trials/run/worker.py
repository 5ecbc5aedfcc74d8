"""A rank process that serves one request and ends: `python -m trials.run.worker --request FOLDER`.

For launchers of other tools, which set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trials import streams
from trials.channels import Channel
from trials.channels.folder import FolderChannel
from trials.errors import SiteError
from trials.launchers.network import address_towards, interface_of


def main() -> None:
    """Serve the request; exit with code 1 when that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", type=Path, required=True, help="folder of the request to serve")
    arguments = parser.parse_args()
    keep_streams()
    if master := os.environ.get("MASTER_ADDR"):  # gloo takes the address of the machine's name, which may be another
        with suppress(SiteError):  # torch says so too
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(master)))
    serve = import_serve()
    from trials.tasks.answer import error_name  # noqa: PLC0415  # as in `import_serve`

    gc.enable()
    channel = FolderChannel(arguments.request)
    if not serve(channel):
        # There may be no agent that tells the user.
        sys.stderr.write(channel.get(error_name(int(os.environ["RANK"]))) or "")
        end_failed()


def end_failed() -> NoReturn:
    """End this process with exit code 1, at once: destructors of a process group would wait for the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def keep_streams() -> None:
    """Replace stdout and stderr by streams whose writes never fail: the disk under a log may be full."""
    streams.hold_descriptors()
    sys.stdout, sys.stderr = streams.lossy(sys.stdout, 1), streams.lossy(sys.stderr, 2)


def import_serve() -> Callable[[Channel], bool]:
    """Import and return `serve`, with torch, DeepSpeed and transformers. Leave the garbage collector disabled.

    The imports make many objects, among which the collector would search again and again in vain, so it is disabled
    meanwhile. `gc.freeze` excludes them afterwards, so that forked ranks share their memory with the parent.
    """
    gc.disable()
    from trials import plugins  # noqa: PLC0415  # not before the process can be ended with its agent
    from trials.model.family import FAMILIES  # noqa: PLC0415
    from trials.run.serving import serve  # noqa: PLC0415

    for _ in plugins.each(FAMILIES):  # imports them, with their models of transformers
        pass
    gc.freeze()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return serve


if __name__ == "__main__":
    main()
