"""One thread for torch in each process: pytest-xdist uses the cores, and two pools get in each other's way."""

import torch

torch.set_num_threads(1)
