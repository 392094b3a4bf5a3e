"""Weights in safetensors files, as Hugging Face's libraries write them.

Files:

    hub                     folders of Hugging Face's: which file holds the weights
    reading                 one file, or several with an index
    writing                 exports tensors as such files
    fitting                 fits tensors and config.json to each other: names, vocabulary, ties, type
    merging                 merges an adapter of PEFT into its base
    logits                  compares the logits of what transformers loads with those of the trained model
"""
