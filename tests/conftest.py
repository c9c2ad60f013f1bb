"""What every test process needs before torch is imported."""

import os

# as in the product's child processes: threads that spin while others work slow both down manyfold
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
