// The Vercel AI SDK on its default for OpenAI, the Responses API.
import { createOpenAI } from '@ai-sdk/openai';
import { run } from './ai_sdk.mjs';
import { API_KEY, BASE_URL, MODEL } from './shell.mjs';

await run(createOpenAI({ baseURL: BASE_URL, apiKey: API_KEY })(MODEL));
