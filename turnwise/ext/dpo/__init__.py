"""Direct preference optimisation: fine-tuning on pairs of answers, the better made likelier and the worse less so."""
