"""Mixed precision in a StepLoop, and in a step of your own.

python examples/04_mixed_precision.py
"""

import torch
from torch import nn

import torch_sink

if __name__ == "__main__":
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = torch.randn(256, 3, 16, 16), torch.randint(0, 10, (256,))
    batches = list(zip(images.split(32), labels.split(32), strict=True))

    def make_model() -> nn.Module:
        layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)]
        return nn.Sequential(*layers).to(device)

    # O1 is autocast, O2 computes everything but normalization, softmax and losses in bfloat16, O3 all but losses.
    for level in ("O0", "O1", "O2", "O3"):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = torch_sink.StepLoop(model, nn.functional.cross_entropy, optimizer, amp=level)
        history = loop.run(batches, epochs=2)
        print(f"{level}: last loss {history.losses[-1]:.3f}, parameters are {next(model.parameters()).dtype}")

    # A loop of your own: float16 with a dynamic scale, skipped steps are skipped on the device.
    model = torch_sink.amp.auto_mixed_precision(make_model(), "O2", torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch_sink.amp.DynamicLossScaler()
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        finite = scaler.step(optimizer)
        scaler.adjust(finite)
    print(f"own loop: loss {loss.item():.3f}, {scaler}")
