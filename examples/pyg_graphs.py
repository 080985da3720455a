"""PyTorch Geometric with compressed activations: the import and `attach(...).follow()` are all that is new.

torchrun --nproc-per-node 2 examples/pyg_graphs.py [--conv gat]     (without a GPU, on the CPU)

Classification of small random graphs in mini-batches. The module whose forward is called gets tensors.
"""

import argparse
import gc
import logging

import torch
import torch.distributed as dist
from torch.nn import Linear, Module
from torch.nn.functional import cross_entropy, dropout, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

import gact_dist

CONVOLUTIONS = {"gcn": GCNConv, "gat": GATConv}


class Classifier(Module):
    def __init__(self, conv):
        super().__init__()
        self.conv1, self.conv2, self.head = conv(32, 128), conv(128, 128), Linear(128, 4)

    def forward(self, x, edge_index, batch):
        x = relu(self.conv1(x, edge_index))
        x = relu(self.conv2(dropout(x, 0.1, self.training), edge_index))
        return self.head(global_mean_pool(x, batch))


def graph(label):
    """Nodes whose features lean towards the label."""
    features = torch.randn(40, 32)
    features[:, label] += 1.0
    return Data(x=features, edge_index=torch.randint(0, 40, (2, 160)), y=label)


parser = argparse.ArgumentParser()
parser.add_argument("--conv", choices=CONVOLUTIONS, default="gcn")
parser.add_argument("--steps", type=int, default=16)
options = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.getLogger("gact_dist").setLevel(logging.INFO)  # one line at attach, and one for each adaptation
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
torch.manual_seed(0)
graphs = [graph(number % 4) for number in range(512)]
loader = DataLoader(graphs, batch_size=16, sampler=DistributedSampler(graphs))
model = DistributedDataParallel(Classifier(CONVOLUTIONS[options.conv]).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
gact = gact_dist.attach(model, level="L2").follow()  # every forward of the model is a step
losses = []
for step, batch in zip(range(options.steps), loader, strict=False):
    batch = batch.to(device)
    loss = cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    values = {"loss": losses[-1]}
    values |= gact.scalars()
    if dist.get_rank() == 0:
        print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
del model, gact  # gloo may abort the process when a reducer outlives its group
gc.collect()
dist.destroy_process_group()
