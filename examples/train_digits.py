"""A small convolutional network on handwritten digits: DeepSpeed with its own arguments, optimizer and data loader.

The "gact" block in the JSON file and the lines with `gact` are all that compression adds to such a script.

python -m examples.train.data image     (downloads the data)
deepspeed --num_gpus 2 examples/train_digits.py --deepspeed --deepspeed_config configs/deepspeed/zero2.json
"""

import argparse
import json
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import gact_dist

DATA = Path(__file__).resolve().parents[1] / ".cache" / "data" / "mnist_5k.csv.gz"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(32 * 7 * 7, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = self.pool(F.gelu(self.conv1(x)))
        x = self.pool(F.gelu(self.conv2(x)))
        return self.fc2(F.gelu(self.fc1(x.flatten(1))))


def add_argument():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    return deepspeed.add_config_arguments(parser).parse_args()


args = add_argument()
args.out.mkdir(parents=True, exist_ok=True)
deepspeed.init_distributed()
torch.manual_seed(42)
table = np.random.RandomState(0).permutation(np.loadtxt(args.data, delimiter=",", dtype=np.float32))
images, labels = torch.from_numpy(table[:, :-1] / 255).view(-1, 1, 28, 28), torch.from_numpy(table[:, -1]).long()
trainset, testset = TensorDataset(images[:512], labels[:512]), (images[4000:], labels[4000:])

net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, _ = gact_dist.deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=trainset
)
device, dtype = model_engine.device, next(net.parameters()).dtype
criterion = nn.CrossEntropyLoss()

losses = []
for epoch in range(args.epochs):
    for inputs, targets in trainloader:
        inputs, targets = inputs.to(device, dtype), targets.to(device)
        loss = criterion(model_engine(inputs), targets)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
    print(f"rank {model_engine.global_rank}: epoch {epoch}, loss {losses[-1]:.4f}")

with torch.no_grad():
    correct = (model_engine(testset[0].to(device, dtype)).argmax(1).cpu() == testset[1]).float().mean().item()
if model_engine.global_rank == 0:
    print(str(model_engine.gact.report()).splitlines()[-1])
    (args.out / "log.json").write_text(json.dumps({"losses": losses, "accuracy": correct}))
    torch.save(model_engine.module.state_dict(), args.out / "model.pt")
model_engine.destroy()
torch.distributed.destroy_process_group()
