"""The doctor: finds from a client's side why an OpenAI- or Anthropic-style endpoint does not answer as it should."""
