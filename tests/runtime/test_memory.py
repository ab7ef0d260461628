"""What an engine keeps in memory besides its weights and its KV cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "bench/serving/models/qwen3-0.6b/config.json"
# Modules and pools, 17 to 30 MB, are 1.04 to 1.07; RoPE beyond the pool 1.09; 1.25 if packing gave
# nothing back.
LIMIT = 1.08
CHILD = Path(__file__).with_name("memory_child.py")


def test_a_loaded_engine_holds_its_weights_and_cache_and_little_else(tmp_path):
    config = {**json.loads(CONFIG.read_text()), "num_hidden_layers": 6, "vocab_size": 65536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(CHILD), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    imported, loaded, held = json.loads(answer.splitlines()[-1])  # bytes
    assert held > 300e6
    assert held < loaded - imported < LIMIT * held
