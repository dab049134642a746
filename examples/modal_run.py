"""The workbook on a rented GPU, by Modal. Not tried by the authors.

    pip install modal && modal setup
    modal run examples/modal_run.py --only "11 21"

The rows and the executed notebooks come back into `figures/` and `runs/` of this checkout.
"""

import io
import subprocess
import tarfile
from pathlib import Path

import modal

ROOT = Path(__file__).parents[1]
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("make", "gcc", "g++")
    .add_local_dir(ROOT, "/workbook", copy=True, ignore=[".venv", ".git", "runs"])
    # With a GPU set-up chooses PyTorch's CUDA build.
    .run_commands("cd /workbook && make setup", gpu="H100")
)
app = modal.App("cs336-systems", image=image)


@app.function(gpu="H100", timeout=2 * 3600)
def run(only: str) -> bytes:
    """Run notebooks; a tar of what they left."""
    arguments = f"--only {only}" if only else ""
    subprocess.run(["make", "run", f"ARGS={arguments}"], cwd="/workbook", check=False)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for folder in ("figures", "runs"):
            tar.add(f"/workbook/{folder}", folder)
    return packed.getvalue()


@app.local_entrypoint()
def main(only: str = "") -> None:
    """Fetch what the run left."""
    with tarfile.open(fileobj=io.BytesIO(run.remote(only))) as tar:
        tar.extractall(ROOT, filter="data")
