"""Where else a run's numbers go: a terminal, TensorBoard, Weights & Biases, MLflow. metrics.jsonl stays the truth."""
