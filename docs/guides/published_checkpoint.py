"""
Title: Load, fine-tune and serve a published checkpoint
Description: A checkpoint in the format of transformers, adapted by LoRA, served over HTTP.
"""

"""
## Introduction

`EfficientCausalLM.from_preset` reads trained models with efficient attention in the format
of Hugging Face transformers: RetNet, GLA, DeltaNet, Gated DeltaNet, Kimi delta, OLMo Hybrid
and Reformer. The result is a KerasHub task on TensorFlow, JAX or PyTorch. This guide loads
a model, fine-tunes it, writes it in the same format, and answers requests with it.

To avoid a download, the guide first makes a small checkpoint in this format. To use a
published checkpoint, replace `CHECKPOINT` by its handle, such as
`"hf://fla-hub/delta_net-1.3B-100B"`, and start at "Load it".

## Setup
"""

import json
import sysconfig
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import tokenizers

from keras_efficient_attn import models

keras.utils.set_random_seed(0)

CHECKPOINT = Path(tempfile.mkdtemp(), "checkpoint")
VOCABULARY_SIZE = 512
SEQUENCE_LENGTH = 128
TEXTS = 1024
EPOCHS = 6
FINE_TUNING_TEXTS = 256
FINE_TUNING_EPOCHS = 4

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def read_texts(pattern, number):
    """`number` pieces of source files, each of 400 characters."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))
    text = "".join(path.read_text(errors="ignore") for path in paths)
    starts = range(0, len(text) - 400, max(400, (len(text) - 400) // number))
    return [text[start : start + 400] for start in starts][:number]


"""
## Make a checkpoint

The folder of a published model has `config.json`, `tokenizer.json` and the weights. With
`load_weights=False`, `from_preset` makes a model with random weights from the first two.
This model is trained on the source of the standard library, and written in the published
format.
"""

general_texts = read_texts("*.py", TEXTS)

tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = tokenizers.decoders.ByteLevel()
tokenizer.train_from_iterator(
    general_texts,
    tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
CHECKPOINT.mkdir()
tokenizer.save(str(CHECKPOINT / "tokenizer.json"))
config = {
    "model_type": "gated_deltanet",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
(CHECKPOINT / "config.json").write_text(json.dumps(config))

new_model = models.EfficientCausalLM.from_preset(str(CHECKPOINT), load_weights=False)
new_model.preprocessor.sequence_length = SEQUENCE_LENGTH
new_model.compile(keras.optimizers.Adam(4e-3), loss, weighted_metrics=[])
new_model.fit(general_texts, batch_size=16, epochs=EPOCHS, verbose=2)
new_model.export_to_transformers(str(CHECKPOINT))
print(sorted(path.name for path in CHECKPOINT.iterdir()))

"""
## Load it

`from_preset` reads the tensors one by one into the model's variables; `dtype="bfloat16"`
halves the memory. If the configuration has an unsupported option that would change the
outputs, an error is raised before any weight is read.
"""

model = models.EfficientCausalLM.from_preset(str(CHECKPOINT))
model.preprocessor.sequence_length = SEQUENCE_LENGTH
print(f"{model.count_params():,} parameters")
print(model.generate("def __init__(self", max_length=48))

"""
## Fine-tune it

LoRA adds small matrices to the projections of queries and values, and trains only these
matrices. Here the model learns the style of one package of the library, `unittest`. A third
of the texts is held out.
"""

own_texts = read_texts("unittest/*.py", FINE_TUNING_TEXTS)
held_out, training = own_texts[::3], own_texts[1::3] + own_texts[2::3]

model.backbone.enable_lora(rank=8)
model.compile(keras.optimizers.Adam(1e-2), loss, weighted_metrics=[])
before = model.evaluate(held_out, batch_size=8, verbose=0, return_dict=True)
history = model.fit(
    training,
    validation_data=(held_out,),
    batch_size=8,
    epochs=FINE_TUNING_EPOCHS,
    verbose=2,
)
losses = [before["loss"], *history.history["val_loss"]]
print(f"loss on held-out texts: {losses[0]:.2f} before, {losses[-1]:.2f} after")

plt.figure(figsize=(6, 4))
plt.plot(range(len(losses)), losses, "o-")
plt.xlabel("epochs of fine-tuning")
plt.ylabel("loss on held-out texts, nats per token")
plt.savefig("published_checkpoint.png", dpi=100, bbox_inches="tight")

"""
![Loss on held-out texts over the epochs of fine-tuning](published_checkpoint.png)

## Write it back

The new folder has the published format, so transformers can read it as well. LoRA's updates
are merged into the weights.
"""

FINE_TUNED = Path(tempfile.mkdtemp(), "fine_tuned")
model.export_to_transformers(str(FINE_TUNED))

"""
## Serve it

The state of the gated delta rule has a constant size, so a server needs the same memory for
a short and a long conversation. This guide uses the HTTP server of Python's standard
library, and answers one request at a time.
"""

served = models.EfficientCausalLM.from_preset(str(FINE_TUNED))
served.compile(sampler="greedy")
turn = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with turn:
            text = served.generate(request["prompt"], max_length=request["max_length"])
        answer = json.dumps({"text": text}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        """Prints nothing for a request."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()

"""
A client sends a prompt and gets the text:
"""

request = urllib.request.Request(
    f"http://127.0.0.1:{server.server_port}",
    json.dumps({"prompt": "    def test_", "max_length": 48}).encode(),
)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["text"])
server.shutdown()
server.server_close()

"""
## Conclusion

A published checkpoint becomes a Keras model: `fit`, LoRA, `quantize`, `save` and `generate`
work as for any other model, on three backends. [Published checkpoints](../checkpoints.md)
lists the models, and [export](../export.md) explains how to run a model without
Keras and this package.
"""
