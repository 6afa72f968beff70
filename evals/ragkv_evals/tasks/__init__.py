"""What ragkv is asked: one file for each task."""

from ragkv_evals.tasks.base import Task
from ragkv_evals.tasks.bioasq import BIOASQ
from ragkv_evals.tasks.citation import CITATION
from ragkv_evals.tasks.hotpotqa import HOTPOTQA
from ragkv_evals.tasks.lines import LINES
from ragkv_evals.tasks.musique import MUSIQUE
from ragkv_evals.tasks.needle import NEEDLE
from ragkv_evals.tasks.ruler import RULER

TASKS: dict[str, Task] = {task.name: task for task in (HOTPOTQA, BIOASQ, MUSIQUE, CITATION, NEEDLE, LINES, RULER)}
