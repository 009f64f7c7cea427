"""`holdfast bench store`: the weight store beside other ways to hand weights from process to process."""
