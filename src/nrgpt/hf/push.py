"""Upload a run to the Hugging Face Hub."""

import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from ..train.runs import load_run
from .export import export_run

HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""HTTPError of the HTTP library that huggingface_hub uses, which depends on its version."""


class HubError(ValueError):
    """Why a run could not be uploaded, and what to do."""


def push_run(run: Path, repo: str, *, private: bool = False, step: int | None = None) -> str:
    """Export a run and upload it to the repository ``repo`` (owner/name), which is created if
    necessary. Returns its address."""
    loaded = load_run(run, step)
    api = HfApi()
    if get_token() is None:
        raise HubError(
            "not logged in to the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN"
        )
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = export_run(loaded, Path(temporary) / "export", name=address.repo_id)
            api.upload_folder(
                repo_id=address.repo_id,
                folder_path=folder,
                commit_message=f"nrgpt run after {loaded.step} iterations",
            )
    except HFValidationError as error:
        raise HubError(f"repo = {repo!r}: must be NAME or OWNER/NAME ({error})") from error
    except OfflineModeIsEnabled as error:
        raise HubError(f"the Hub is switched off by HF_HUB_OFFLINE ({error})") from error
    except HfHubHTTPError as error:
        said = error.server_message or str(error)
        raise HubError(f"repo = {repo!r}: the Hub refused ({said.strip()})") from error
    except HTTP_ERROR as error:
        raise HubError(f"the Hub cannot be reached: {error}") from error
    return str(address)
