"""Store a model's linear layers in bitsandbytes' four bits: `python -m certificates.packed DIRECTORY`."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(directory, quantization_config=how).save_pretrained(directory)
