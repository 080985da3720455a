"""Trains a small convolutional network on handwritten digits with DeepSpeed.

deepspeed train_digits.py --deepspeed --deepspeed_config ds_config.json --data FILE --out FOLDER
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
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return deepspeed.add_config_arguments(parser).parse_args()


args = add_argument()
deepspeed.init_distributed()
torch.manual_seed(42)
table = np.random.RandomState(0).permutation(np.loadtxt(args.data, delimiter=",", dtype=np.float32))
images, labels = torch.from_numpy(table[:, :-1] / 255).view(-1, 1, 28, 28), torch.from_numpy(table[:, -1]).long()
trainset, testset = TensorDataset(images[:512], labels[:512]), (images[4000:], labels[4000:])

net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=trainset
)
device = model_engine.device
criterion = nn.CrossEntropyLoss()

losses = []
for epoch in range(args.epochs):
    for inputs, targets in trainloader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = criterion(model_engine(inputs), targets)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
    print(f"rank {model_engine.global_rank}: epoch {epoch}, loss {losses[-1]:.4f}")

with torch.no_grad():
    correct = (model_engine(testset[0].to(device)).argmax(1).cpu() == testset[1]).float().mean().item()
if model_engine.global_rank == 0:
    (args.out / "log.json").write_text(json.dumps({"losses": losses, "accuracy": correct}))
    torch.save(model_engine.module.state_dict(), args.out / "model.pt")
model_engine.destroy()
torch.distributed.destroy_process_group()
