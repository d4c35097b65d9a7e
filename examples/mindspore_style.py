"""For users of MindSpore: Model.train with sinks, then the functional form with data_sink.

python examples/mindspore_style.py DIR
"""

import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import torch_sink
from torch_sink import CheckpointConfig, LossMonitor, Model, ModelCheckpoint, TimeMonitor, amp, data_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    train = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    photos = datasets.ImageFolder(sys.argv[1], train)
    dataset, loss_fn = DataLoader(photos, batch_size=8, shuffle=True), nn.CrossEntropyLoss()

    def make_network() -> nn.Module:
        layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16 * 4 * 4, len(photos.classes)))

    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    model = Model(network, loss_fn, optimizer, metrics={"accuracy"}, amp_level="O2")
    with tempfile.TemporaryDirectory() as folder:
        config = CheckpointConfig(save_checkpoint_steps=20, keep_checkpoint_max=2)
        callbacks = [LossMonitor(), TimeMonitor(), ModelCheckpoint("mlp", folder, config)]
        # 4 epochs of 10 steps each, whatever the number of batches: the data are traversed on and on.
        model.train(4, dataset, callbacks, dataset_sink_mode=True, sink_size=10)
    print(model.eval(dataset))

    # The functional form: each call runs 10 steps and returns the last output.
    network = amp.auto_mixed_precision(make_network(), "O2", torch.float16)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    scaler = amp.DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=100)

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(network(images), labels)
        scaler.scale(loss).backward()
        scaler.adjust(scaler.step(optimizer))
        return loss.detach()

    sink_process = data_sink(train_step, torch_sink.SinkLoader(dataset), sink_size=10)
    for epoch in range(3):
        print(f"epoch {epoch}: loss {sink_process().item():.4f}")
