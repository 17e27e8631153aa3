"""Penstock's engine beside vLLM, OpenVINO GenAI and llama.cpp: `make bench-peers`."""
