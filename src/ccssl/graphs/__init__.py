"""Knowledge graphs: facts as triples, models that score tails, filtered ranks, training, predictions."""
