import os

# Bits and times are compared: every rank computes on one thread.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
