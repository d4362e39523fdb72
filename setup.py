"""Installation of `megatron-branch`.

NVIDIA apex is deliberately no requirement: the package of that name on PyPI is an unrelated project. Where NVIDIA's is
installed from its source, `optimizer.name: apex_fused_adam` uses it.
"""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "gguf": ["gguf>=0.10", "accelerate>=1.1"],
    "plot": ["matplotlib>=3.8"],
    "gpu": ["flash-attn>=2.7"],
    "dev": [
        "hypothesis>=6.100",
        "mypy>=1.13",
        "pre-commit>=3.8",
        "pytest>=8.2",
        "pytest-xdist>=3.6",
        "ruff>=0.12",
        "types-PyYAML>=6",
    ],
}

setup(
    name="megatron-branch",
    version="0.1.0",
    description="RL on trees of rollouts: shared prefixes computed once, on Megatron pipelines under DeepSpeed",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["megatron_branch", "megatron_branch.*"]),
    package_data={"megatron_branch": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "deepspeed>=0.19,<0.20",
        "transformers>=5,<6",
        "safetensors>=0.4.3",
        "numpy>=1.26",
        "pydantic>=2.7",
        "PyYAML>=6",
        "rich>=13.7",
        "psutil>=5.9",
        "wandb>=0.31",
    ],
    extras_require=EXTRAS,
)
