"""Loss curves of a run in TensorBoard, Weights & Biases, trackio or MLflow, from the run's events: by a process of its
own, so that no tracker that hangs or fails can disturb the training."""
