"""Downloads models by name from the Hugging Face Hub, or the hub at ``HF_ENDPOINT``, into the Hugging Face cache."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lamina.core.errors import ModelError
from lamina.models.checkpoint import INDEX, WEIGHTS

log = logging.getLogger(__name__)

DESCRIPTIONS = frozenset(
    (
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("special_tokens_map.json", "chat_template.jinja", INDEX),
    )
)
"""The files of a model besides its weights and its named chat templates."""

NAMED_TEMPLATES = "additional_chat_templates"
"""The folder of a model's chat templates that have names."""

SPARE_NBYTES = 64 << 20  # bytes of the disk that must stay free
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


def is_name(model: str) -> bool:
    """Return whether ``model`` may be the name of a model on a hub: OWNER/NAME or OWNER/NAME@REVISION."""
    return _NAME.fullmatch(model) is not None


def download(model: str, *, weights: bool) -> Path:
    """Download the missing files of a model, with progress bars on standard error. Returns its directory.

    Interrupted transfers are resumed. If the download fails, complete files stay in the cache. If the hub cannot be
    reached, the model must be in the cache.

    Args:
        model: OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit.
        weights: Download the weights too.

    Raises:
        ModelError: There is no such model, it is not accessible, the disk is full, or the download failed.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    failures = (OSError, HTTPError, ValueError, TypeError, KeyError)  # the last three: malformed answers

    match = _NAME.fullmatch(model)
    if match is None:
        raise ModelError(f"{model!r} is no name of a model; give OWNER/NAME or OWNER/NAME@REVISION")
    name, revision = match["name"], match["revision"]
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    except OfflineModeIsEnabled:
        return _cached(name, revision, "HF_HUB_OFFLINE is set")
    except failures as error:
        why = _explain(error, model)
        if _is_final(error):
            raise ModelError(why) from error
        return _cached(name, revision, why)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    try:
        wanted = {file for file in sizes if file in DESCRIPTIONS or file.startswith(f"{NAMED_TEMPLATES}/")}
        if weights:
            index = Path(hf_hub_download(name, INDEX, revision=info.sha)) if INDEX in sizes else None
            wanted |= _weight_files(model, sizes, index)
        _require_room(name, info.sha, {file: sizes[file] for file in wanted})
        return Path(snapshot_download(name, revision=revision, allow_patterns=sorted(wanted)))
    except failures as error:
        raise ModelError(_explain(error, model)) from error


def _weight_files(model: str, files: Mapping[str, int], index: Path | None) -> set[str]:
    """Return the files with the weights: the single file, or the files that the index names."""
    from lamina.models.checkpoint import read_index

    if WEIGHTS in files:
        return {WEIGHTS}
    if index is not None:
        return set(read_index(index).values()) & files.keys()
    raise ModelError(
        f"{model} has no safetensors weights (its files: {', '.join(sorted(files)[:8])}); convert it with "
        "transformers: AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(DIR)"
    )


def _require_room(name: str, commit: str, sizes: Mapping[str, int]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    missing = [file for file in sizes if not isinstance(try_to_load_from_cache(name, file, revision=commit), str)]
    needed = sum(sizes[file] for file in missing)
    cache = Path(constants.HF_HUB_CACHE)
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if missing and needed + SPARE_NBYTES > free:
        raise ModelError(
            f"{name} needs {needed} bytes in {cache}, where {free} are free; set HF_HOME to a directory with more "
            "room, or delete models (`lamina models` lists them)"
        )


def _cached(name: str, revision: str | None, why: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        raise ModelError(f"{name} is not in the Hugging Face cache, and cannot be downloaded: {why}")
    log.warning("%s comes from the Hugging Face cache: %s", name, why)
    return Path(config).parent


def _is_final(error: BaseException) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    return isinstance(error, RepositoryNotFoundError | RevisionNotFoundError) or status in (401, 403, 404)


def _explain(error: BaseException, model: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    cause = next((each for each in _causes(error) if isinstance(each, HfHubHTTPError)), error)
    name, _, revision = model.partition("@")
    hub = constants.ENDPOINT
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
    if isinstance(cause, GatedRepoError):
        return f"{name} is gated: ask for access at {hub}/{name}, and set HF_TOKEN to a token of your account"
    if isinstance(cause, RevisionNotFoundError):
        return f"{name} has no revision {revision or 'main'!r} at {hub}; give a branch, a tag or a commit"
    if isinstance(cause, RepositoryNotFoundError) or status in (401, 403, 404):
        return (
            f"{name} is neither a directory here nor a model at {hub} that may be read; check the name, or set "
            "HF_TOKEN for a private model"
        )
    if status:
        limited = " (it limits requests; HF_TOKEN raises the limit)" if status == 429 else ""
        return f"{hub} answered with status {status}{limited}; try again later. Complete files are kept"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no room is left for {name}; set HF_HOME to a directory with more room"
    first = " ".join(str(next(reversed([*_causes(error)]))).split()) or type(error).__name__
    return f"the download of {name} from {hub} failed: {first}. Run the command again: complete files are kept"


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def cached_models() -> list[tuple[str, str, Path, int]]:
    """Return name, commit, directory and bytes on disk of each model in the Hugging Face cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories: Any = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (repository.repo_id, revision.commit_hash, Path(revision.snapshot_path), revision.size_on_disk)
        for repository in repositories
        if repository.repo_type == "model"
        for revision in repository.revisions
        if os.path.isfile(revision.snapshot_path / "config.json")
    )
