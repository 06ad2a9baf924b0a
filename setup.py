"""Package metadata. Each dependency is chosen on purpose and bounded."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

EXTRAS = {
    "dev": [
        "pytest>=8,<10",
        "pytest-timeout>=2.3,<3",
        "hypothesis>=6.100,<7",
        "ruff>=0.8,<1",
        "mypy>=1.13,<3",
        "import-linter>=2.1,<3",
        "types-PyYAML>=6,<7",
        "psutil>=5.9,<8",
    ],
    "hf": ["tokenizers>=0.20,<1", "transformers>=4.46,<6"],
    "tiktoken": ["tiktoken>=0.8,<1"],
    "zstd": ["zstandard>=0.22,<1"],
    "te": ["transformer-engine[pytorch]>=2.0,<3"],
    "flash": ["flash-attn>=2.6,<3"],
}

setup(
    name="megatron-long-context",
    version="0.1.0",
    description="Context-parallel GPT pretraining from 4K to 1M+ tokens in one run",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron", "megatron.*", "tools"]),
    py_modules=["pretrain_gpt"],
    install_requires=[
        "torch>=2.13,<2.14",
        "numpy>=1.26,<3",
        "sentencepiece>=0.2,<0.3",
        "datasets>=3,<6",
        "pyyaml>=6,<7",
        "tqdm>=4.66,<5",
        "matplotlib>=3.8,<4",
        "tensorboard>=2.16,<3",
        "wandb>=0.17,<1",
    ],
    extras_require=EXTRAS,
)
