"""Whether the processes of a job see one folder."""

import socket
import uuid

import jax
from etils import epath

from jaxrl.files import writable_folder
from jaxrl.parallel import agree, gather, is_first


def shared_folder(field: str, path: str) -> epath.Path:
    """`writable_folder`, if all processes of the job see the same one; a collective.

    On hosts with folders of their own each would hold a part of a checkpoint.

    Raises:
        ValueError: it cannot be written to, or process 0 wrote a file into it that another process
            does not see; the message names the config field.
    """
    folder = writable_folder(field, path)
    if jax.process_count() == 1:
        return folder
    probe = folder / f".jaxrl_shared_test_{agree(uuid.uuid4().hex)}"
    if is_first():
        probe.write_text("")
    gather(None)  # it is there
    seen = gather((probe.exists(), socket.gethostname()))
    if is_first():
        probe.unlink()
    for process, (sees, host) in enumerate(seen):
        if not sees:
            raise ValueError(
                f"{field}={str(folder)!r} is not one folder for all processes: process {process} "
                f"on {host} does not see what process 0 on {seen[0][1]} writes there. Choose one "
                "that all hosts share, or a bucket"
            )
    return folder
