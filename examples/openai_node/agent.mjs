// Answer a question with a tool, by openai-node's tool runner.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:8100/v1" });

async function getWeather({ city }) {
  return `It rains in ${city}, at 7 degrees.`;
}

const runner = client.chat.completions.runTools({
  model: "gpt-4.1-mini",
  messages: [{ role: "user", content: "Do I need an umbrella in Oslo?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the weather in a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        parse: JSON.parse,
        function: getWeather,
      },
    },
  ],
});

console.log(await runner.finalContent());
