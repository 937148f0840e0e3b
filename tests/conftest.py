import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tests share their cores, and one thread gives the same bits everywhere
settings.register_profile("busy", deadline=None)  # how long an example takes depends on who else is computing
settings.load_profile("busy")
