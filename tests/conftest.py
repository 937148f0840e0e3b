import signal

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tests share their cores, and one thread gives the same bits everywhere
settings.register_profile("busy", deadline=None)  # how long an example takes depends on who else is computing
settings.load_profile("busy")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
