"""A project that uses torch_sink: runs on the installed wheel, and type-checks strictly (`make check`)."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_sink

torch_sink.set_image_backend("PIL")
batches = torch_sink.SinkLoader(DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), 4))
model = torch.nn.Linear(3, 2)
loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
history: torch_sink.RunHistory = loop.run(batches, callbacks=[torch_sink.LossMonitor()])
losses: torch.Tensor = history.losses
verdict: str = batches.stats().verdict
print(len(losses), verdict, torch_sink.__file__)
