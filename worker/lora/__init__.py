"""LoRA adapters: reads them, keeps the loaded ones, and adds their terms to a step."""
