"""The wire formats that become chat calls: Responses, Messages and Gemini, beside the core's own."""
