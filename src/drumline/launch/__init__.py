"""Starting ranks on this machine, watching them, and saying which one failed first.

In: a picklable function that runs one rank, and how many ranks. Out: one exit code, and a log file a rank.
"""

from drumline.launch.detect import must_launch
from drumline.launch.local import launch_local

__all__ = ["launch_local", "must_launch"]
