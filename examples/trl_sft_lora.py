"""TRL's SFTTrainer with LoRA of PEFT: the import and `add_callback` are all that is new.

torchrun --nproc-per-node 2 examples/trl_sft_lora.py [any option of SFTConfig, such as --gradient_checkpointing false]

A small Llama with random weights and made-up sentences, so that nothing is downloaded. One process for each GPU;
without a GPU, on the CPU.
"""

import gc
import logging

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from gact_dist.integrations.transformers import GactCallback

SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
WORDS = [f"word{number}" for number in range(200)]

logging.basicConfig(format="%(message)s")
logging.getLogger("gact_dist").setLevel(logging.INFO)  # one line at attach, and one for each adaptation
parser = HfArgumentParser(SFTConfig)
parser.set_defaults(output_dir="runs/trl_sft_lora", max_steps=8, per_device_train_batch_size=8, logging_steps=1)
parser.set_defaults(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available())
parser.set_defaults(bf16=torch.cuda.is_available(), learning_rate=1e-3)
(arguments,) = parser.parse_args_into_dataclasses()
set_seed(3)
vocabulary = Tokenizer(WordLevel({word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}, "<unk>"))
vocabulary.pre_tokenizer = Whitespace()
starts = torch.randint(0, 200, (256,)).tolist()
sentences = Dataset.from_list([{"text": " ".join(WORDS[(a + 7 * i) % 200] for i in range(32))} for a in starts])
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=64, **sizes))
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=sentences,
    processing_class=PreTrainedTokenizerFast(tokenizer_object=vocabulary, **SPECIAL),
    peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
)
trainer.add_callback(GactCallback(trainer, "L2"))
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
del trainer  # gloo may abort the process when a reducer outlives its group
gc.collect()
if torch.distributed.is_initialized():  # not in a single process
    torch.distributed.destroy_process_group()
