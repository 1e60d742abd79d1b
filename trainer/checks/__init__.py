"""What stops a group, a version or the training: another engine's logprobs, a worse policy, a hacked reward."""
