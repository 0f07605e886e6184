"""Send the adapters of PEFT to a follower, which has the base model already."""

import subprocess
import sys

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import aiockpt

STEPS = 3
WORDS = torch.arange(8).reshape(1, 8)


def make_model():
    torch.manual_seed(0)  # in your program: from_pretrained, in both processes
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"]))


def train():
    model = make_model().train()
    chosen = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=0.1)
    with aiockpt.make_background_transport() as transport:
        command = [sys.executable, __file__, "follow"]
        ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **ends) as follower:
            # Not an argument, which every user of the host can read: it has the token.
            print(transport.metadata(), file=follower.stdin, flush=True)
            for step in range(1, STEPS + 1):
                model(input_ids=WORDS, labels=WORDS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                adapters = get_peft_model_state_dict(model)
                transport.send_checkpoint(step=step, state_dict=adapters)
                print(follower.stdout.readline(), end="")
        assert follower.returncode == 0
    print(f"the trainer answers  {answer(model)}")


def follow(metadata):
    model = make_model()
    with aiockpt.make_background_transport() as transport:
        adapters = get_peft_model_state_dict(model)  # its own tensors, filled in place
        for step, _ in transport.follow(metadata, into=adapters):
            print(f"the follower answers {answer(model)} after step {step}", flush=True)
            if step == STEPS:
                break


def answer(model):
    with torch.no_grad():
        return model.eval()(input_ids=WORDS).logits.sum().item()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        follow(sys.stdin.readline().strip())
    else:
        train()
