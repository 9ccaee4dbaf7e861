"""Where others look at a training's numbers: TensorBoard, Weights & Biases, MLflow."""
