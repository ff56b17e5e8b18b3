"""River-LLM: token-level early exit for decoder-only language models, in plain PyTorch."""

import warnings

# numpy is not among the project's requirements, and PyTorch says so once a process.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from .errors import RiverError  # noqa: E402
from .llm import RiverLLM, load  # noqa: E402
from .settings import Settings  # noqa: E402

__all__ = ["RiverError", "RiverLLM", "Settings", "load"]
