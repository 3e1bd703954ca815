"""Whether this process runs Triton's kernels on CPU tensors, which is chosen before Triton is loaded."""

import os

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
