import torch

torch.set_num_threads(1)  # the tests share their cores, and one thread gives the same bits everywhere
