"""Schedules: their classes, their actions, and the steps from an order to one that can run."""

import torch as torch
from torch.profiler import record_function as record_function

from taktline.compat.torch_pipelining._action import *  # noqa: F403
from taktline.compat.torch_pipelining._checks import *  # noqa: F403
from taktline.compat.torch_pipelining._lowering import *  # noqa: F403
from taktline.compat.torch_pipelining._orders import *  # noqa: F403
from taktline.compat.torch_pipelining._p2p import *  # noqa: F403
from taktline.compat.torch_pipelining._passes import *  # noqa: F403
from taktline.compat.torch_pipelining._runtime import *  # noqa: F403
