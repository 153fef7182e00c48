"""Training on given answers: `gcore-llm sft`, `gcore-llm reward-model` and `gcore-llm dpo`."""
