"""River-LLM: token-level early exit for decoder-only language models, in plain PyTorch."""

import warnings

# numpy is not among the project's requirements, and PyTorch says so once a process.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
