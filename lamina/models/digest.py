"""A digest of a checkpoint, by which compute workers on several machines know that they have loaded the same one."""

import contextlib
import hashlib
import json

from lamina.models.directory import ModelDirectory

SAMPLE_NBYTES = 4096
DIGEST_NBYTES = 8


def checkpoint_digest(model: ModelDirectory) -> str:
    """16 hex digits that depend on the configuration, on every tensor's name, type and shape, and on samples of its
    data: 4 KiB at the beginning, in the middle and at the end.

    Reading a whole checkpoint takes as long as loading it. Training changes all of a tensor, so samples tell two
    checkpoints apart; a bit that has been flipped elsewhere is not found.
    """
    made = hashlib.blake2b(digest_size=DIGEST_NBYTES)
    made.update(json.dumps(model.config, sort_keys=True).encode())
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context(file.open("rb")) for file in {one.file for one in model.tensors.values()}}
        for name, entry in sorted(model.tensors.items()):
            made.update(repr((name, entry.dtype, entry.shape, entry.nbytes)).encode())
            last = max(0, entry.nbytes - SAMPLE_NBYTES)
            for offset in sorted({0, last // 2, last}):
                files[entry.file].seek(entry.start + offset)
                made.update(files[entry.file].read(min(SAMPLE_NBYTES, entry.nbytes)))
    return made.hexdigest()
