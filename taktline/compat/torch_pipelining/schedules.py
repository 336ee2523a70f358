"""Schedules: their classes, their actions, and the steps from an order to one that can run."""

from taktline.compat.torch_pipelining._action import *  # noqa: F403
from taktline.compat.torch_pipelining._runtime import *  # noqa: F403
