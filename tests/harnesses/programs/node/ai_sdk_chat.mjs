// The Vercel AI SDK on the chat API.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { run } from './ai_sdk.mjs';
import { API_KEY, BASE_URL, MODEL } from './shell.mjs';

await run(createOpenAICompatible({ name: 'turnwise', baseURL: BASE_URL, apiKey: API_KEY })(MODEL));
